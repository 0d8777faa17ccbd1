"""The stand-in card's entry in the table of devices, with NCCL's way of sharing."""

from scaletorch.dist.devices import DeviceEntry, entry_of_backend

ENTRY = DeviceEntry("card", "cardcl", "torch_card", sharing=entry_of_backend("nccl").sharing)
