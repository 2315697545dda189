"""Model knowledge that no checkpoint stores: which dim tp cuts, what is fused, how parameters are named.

One JSON table per model family and library; see ``rules/README.md`` beside this file for its fields.
"""
