"""Storage: files and folders that are named by an address, wherever fsspec can reach them, with retries.

Work is done on local folders alone, so nothing else of the package has to know:

    fetch(url)    -> local folder     inputs, copied to a cache folder; what is there already is not copied again
    output(url)   -> local folder     claimed for one job, mirrored while it is filled, published when it is whole

Where many processes of several machines write, each puts single files there by itself: see `files`.
"""

from dnis_torchrec.storage.access import (
    StorageError,
    exists,
    expand,
    filesystem,
    is_url,
    local_path,
    read_bytes,
    retrying,
    version_of,
)
from dnis_torchrec.storage.fetching import cache_folder, fetch, local_copy_of
from dnis_torchrec.storage.files import Address, file_names, file_size, holds, inside, local_file, put_file, remove_file
from dnis_torchrec.storage.outputs import Mirror, output, shared_output

__all__ = [
    "Address",
    "Mirror",
    "StorageError",
    "cache_folder",
    "exists",
    "expand",
    "fetch",
    "file_names",
    "file_size",
    "filesystem",
    "holds",
    "inside",
    "is_url",
    "local_copy_of",
    "local_file",
    "local_path",
    "output",
    "put_file",
    "read_bytes",
    "remove_file",
    "retrying",
    "shared_output",
    "version_of",
]
