"""Write tables and numbers of result files into the documentation: ``python -m experiments.pages``.

A table stands in a page between ``<!-- table: NAME -->`` and ``<!-- /table -->``. NAME is a function with the
decorator ``@table``. Each page with tables has a file here (``audit.py`` for ``docs/audit.md``), and
``filling.py`` imports all of them. A result that does not exist yet leaves no row.

A number in running text stands between ``<!-- value: PATH FORMAT -->`` and ``<!-- / -->``::

    <!-- value: surfaces-h200:victims:momentum-500/*:as?saved:all:0.9 .1f -->26.3<!-- / -->

PATH is a file of ``experiments/results`` or ``benchmarks/results`` without its ending, followed by keys with
colons between them. With ``+`` after its name, the file stands for the files of all seeds. ``*`` and ``?``
are wildcards, and ``?`` also stands for a blank or a colon in a key. The value is the mean of all matches.
FORMAT is a format of Python, by default at most one decimal. ``min=``, ``max=``, ``sum=``, ``count=`` and
``each=`` before the format replace the mean. A number that we did not measure, such as a published number or
an aim, stands between ``<!-- given -->`` and ``<!-- / -->``.

A test checks that the committed pages are what this program writes. It also checks that all decimals,
percentages and counts ("3 of 20") in the running text of the pages in ``PROSE`` stand between such marks.
"""
