"""What ranks share beyond layers: sequences between regions, and gradients that are summed."""
