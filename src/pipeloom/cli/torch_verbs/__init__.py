"""Verbs that run models. Each loads torch when it runs, not when its help is shown."""
