"""The doctor: do launcher, cards and process group work together? What it checks and how it reports it.

Each rank examines itself (:mod:`~exp.doctor.local_checks`) and the job that it is part of
(:mod:`~exp.doctor.joint_checks`), and keeps a record in a file of its own as it goes (:mod:`~exp.doctor.record`). The
parent puts the records together when the launch has ended (:mod:`~exp.doctor.verdict`, :mod:`~exp.doctor.table`): it
survives whatever happens to the ranks, and needs no torch.
"""
