"""Runs LMQL's server, in a separate environment: ``python _lmql_server.py MODEL PORT``."""

import sys

from lmql.models.lmtp.lmtp_serve import serve

if __name__ == "__main__":
    serve(sys.argv[1], host="127.0.0.1", port=int(sys.argv[2]))
