"""Programs beside the training: its speed, its summary, draft models, draft vocabularies, calibration."""
