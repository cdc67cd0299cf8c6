"""What would drafting gain, on which machine, at which lengths? Calculates step times, simulates
rollouts with their long tail, and gives the answer; nothing here starts an engine.

Times on a GPU come from tables of measured operators if the package aiconfigurator-core is
installed, and otherwise from a roofline of the vendor's figures; on a CPU they are measured on this
machine. Start at `prediction.py`.
"""
