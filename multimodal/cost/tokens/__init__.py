"""The context parallel rank of each token: of blocks of a sequence, or of whole items. Known from lengths alone."""
