"""The report of a run, made of what was seen while it was watched.

run_facts    the facts of a run that has ended, and their form as JSON
run_report   from the facts to HTML and to lines; RunReport: what `results.report()` gives; compare
"""
