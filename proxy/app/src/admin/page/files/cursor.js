// One time cursor over all plots: where the pointer is in one, all that have a time axis show the same moment.
