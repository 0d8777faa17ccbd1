"""The stand-in card's entry in the table of devices, with NCCL's variables."""

from scaletorch.dist.devices import DeviceEntry, entry_of_backend

NCCL = entry_of_backend("nccl")
ENTRY = DeviceEntry("card", "cardcl", "torch_card", sharing=NCCL.sharing, variables=NCCL.variables)
