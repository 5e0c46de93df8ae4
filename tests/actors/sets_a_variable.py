"""A module whose import sets an environment variable."""

import os

os.environ["SET_BY_AN_IMPORT"] = "1"
