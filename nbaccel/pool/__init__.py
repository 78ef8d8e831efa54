"""The pool: workers that live on between cells, with a namespace of their own."""
