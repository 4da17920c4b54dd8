"""Storage: files and folders that are named by an address, wherever fsspec can reach them, with retries.

Work is done on local folders alone, so nothing else of the package has to know:

    fetch(url)    -> local folder     inputs, copied to a cache folder; what is there already is not copied again
    output(url)   -> local folder     claimed for one job, mirrored while it is filled, published when it is whole

Where many processes of several machines write, each puts single files there by itself: see `files`.
"""
