"""`forecast`: steps that were not measured, on this device or another."""
