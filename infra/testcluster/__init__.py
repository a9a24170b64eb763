"""Simulates several hosts on one machine with Linux namespaces, to try out and test training on a cluster.

::

    with Cluster.temporary("try", nodes=2, share=folder) as cluster:
        cluster.exec("head", ["ssh", "node0", "hostname"])
        cluster.power_cut("node1")

``python -m infra.testcluster`` does the same from a terminal; docs/tutorials/test-cluster.md describes it. Not here:
tests (``tests.cluster``).
"""

from infra.testcluster.cluster import Cluster

__all__ = ["Cluster"]
