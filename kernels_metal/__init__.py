"""Fused Metal versions of hot functions of the core, one file a kernel; each names its twin in `common/` first."""
