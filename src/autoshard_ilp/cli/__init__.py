"""The command line: ``autoshard plan | explain | verify | sweep | pareto | mesh | compare | profiles | calibrate``."""
