"""The engines that a loop generates with: vLLM in this process, in Ray actors, behind HTTP,
attached, or several of these.
"""
