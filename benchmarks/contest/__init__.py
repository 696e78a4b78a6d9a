"""The service against its competitors, case by case, with tables and plots of the outcomes."""
