//! Locking. A poisoned lock (its holder panicked) is used as before: the data are counters and queues that
//! every step leaves consistent, and refusing them would turn one failed request into a dead model.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
