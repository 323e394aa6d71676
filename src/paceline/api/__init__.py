"""What programs call: the verbs that run something, and those that predict it without torch."""
