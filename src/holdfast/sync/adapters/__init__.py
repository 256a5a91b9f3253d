"""Weight versions for frameworks with an interface of their own for them: a module each, which imports it lazily."""
