"""Speed on a GPU, as ratios measured in one run: against a device-to-device copy, an empty kernel, and the peers."""
