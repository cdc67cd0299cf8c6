"""Other people's loops: TRL, verl, OpenRLHF, and what their hooks share."""
