"""The context parallel rank of each token, known from lengths alone: the value, and how whole items are dealt."""
