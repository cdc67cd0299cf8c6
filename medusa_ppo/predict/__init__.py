"""What would drafting gain, on which machine, at which lengths? Step times on paper, rollouts with
their long tail, and the answer; nothing here starts an engine.

Seconds come from measured tables of operators where the package aiconfigurator-core is installed,
from a roofline of the vendor's figures where it is not, and on a CPU from this machine itself.
Start at `prediction.py`.
"""
