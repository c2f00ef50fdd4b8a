"""What a server serves, how it is, and how busy.   python admin.py [TARGET]"""

import sys

import mlxstream
from mlxstream.v1.admin_pb2 import GetLoadRequest

with mlxstream.Client(*sys.argv[1:2]) as client:
    client.wait_ready()
    print(f"serving {client.model().name}")
    try:
        load = client.call("AdminService/GetLoad", GetLoadRequest())
        print(f"{load.running} running, {load.queued} waiting")
    except mlxstream.UnsupportedError:
        print("this server has no service for operators")
