"""The c10d backend 'mpi4py': MPI for torch's wheels, which are built without it."""
