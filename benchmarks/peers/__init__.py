"""Programs that apply and take in processes of their own, each in the environment of what it measures."""
