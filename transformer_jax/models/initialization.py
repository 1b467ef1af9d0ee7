"""How the weights of BERT, GPT-2 and XLNet are initialized."""

STANDARD_DEVIATION = 0.02
"""Of all their weights (Radford et al. 2018, section 4.1), but for those that a paper says otherwise of."""
