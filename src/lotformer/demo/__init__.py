"""`lotformer demo`: a real sentence encoder converted, calibrated, measured and shown, from nothing."""
