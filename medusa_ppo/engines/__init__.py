"""What a loop talks to: vLLM in this process, in Ray actors, behind HTTP, attached, or several of
them.
"""
