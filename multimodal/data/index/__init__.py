"""The index of samples: their lengths and tokens as arrays in files that ranks share, so that no sample is read twice."""
