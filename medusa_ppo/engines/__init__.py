"""What a loop talks to: vLLM in this process, in Ray actors, behind HTTP, attached, or many of
them.
"""
