"""The transfer connector inside vLLM.

connector   the class that vLLM makes, once per role; delegates, never thinks
facade      the edge where our errors end
scheduler   what vLLM's scheduler says, to the halves of producer and consumer
worker      what vLLM's worker says, to the ranks
messages    what the two send each other
identity    how this rank's cache looks, and what must be equal for its bytes to mean the same
refusals    what cannot be transferred, refused at start with the reason
"""
