"""The page of `anybatch watch`, built from untrusted logs."""
