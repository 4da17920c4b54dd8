"""How a packaged model is served without dnis_torchrec: load_package.py in Python, cpp/ in C++."""
