"""Processes, rendezvous, files, hardware, data and the console."""
