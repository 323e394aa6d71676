"""Measure the speed of layers, exchanges, devices and this machine."""
