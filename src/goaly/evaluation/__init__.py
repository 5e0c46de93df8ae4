"""What a policy is worth: the problems that it is asked, and what its answers come to."""
