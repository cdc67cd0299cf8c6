"""Where hidden states and tables come from: transformers models, Megatron models, models with
images.
"""
