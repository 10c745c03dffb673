//! Locking. A poisoned lock (its holder panicked) is used as before. The data are counters and queues that
//! every step leaves consistent. Refusing to use them would turn one failed request into a model that serves
//! none.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
