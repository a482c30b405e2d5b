"""`dspine bench`: what a pair costs on this machine, end to end and phase by phase, beside its floor."""
