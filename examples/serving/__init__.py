"""Examples that serve a packaged model without dnis_torchrec: load_package.py in Python, cpp/ in C++."""
