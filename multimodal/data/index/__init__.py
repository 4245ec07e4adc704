"""What is known of samples without reading them again: in arrays, in files that ranks share."""
