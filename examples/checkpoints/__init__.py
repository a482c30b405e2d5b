"""Trained drafters that ship with the project, one folder each (installed as the data package `dspine.checkpoints`)."""
