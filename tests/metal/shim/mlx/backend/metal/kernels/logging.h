// Nothing to log to.
#pragma once
