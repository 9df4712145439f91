"""Measuring a deployment: load, sweeps of topologies and loads, one-batch tables."""
