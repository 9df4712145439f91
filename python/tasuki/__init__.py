"""Tasuki: prefill/decode-disaggregated LLM serving."""
