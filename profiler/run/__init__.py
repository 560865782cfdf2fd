"""The main job: validate the options, set up, measure, judge, report."""
