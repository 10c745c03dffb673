//! Locking. A poisoned lock (its holder panicked) is used as before, because every step leaves the data
//! consistent. Otherwise one failed request would stop a whole model.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, poisoned or not.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
