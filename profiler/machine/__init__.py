"""What the model runs on: clocks, memory, telemetry, datasheets; the one door to the device."""
