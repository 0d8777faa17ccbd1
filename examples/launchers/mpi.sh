#!/bin/bash
# The ranks of mpirun, of Open MPI or MPICH:  ./mpi.sh 4
# More ranks than cores, with Open MPI:  MPIRUN="mpirun --oversubscribe" ./mpi.sh 4
# On several nodes (--hostfile hosts, -f hosts) install mpi4py, or set MASTER_ADDR and MASTER_PORT.
set -euo pipefail
cd "$(dirname "$0")"

${MPIRUN:-mpirun} -n "${1:-2}" python train.py "${@:2}"
